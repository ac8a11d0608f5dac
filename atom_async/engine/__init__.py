"""The asyncio tasks around the scheduler, and the faces that clients use."""
