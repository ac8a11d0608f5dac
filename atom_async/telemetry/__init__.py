"""What is measured of requests and engine, and the names it is published under."""
