"""Models on disk: what is fetched and kept, what a file says of itself, and what the workers need of it."""
