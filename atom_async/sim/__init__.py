"""The engine in virtual time: an event loop whose clock jumps, and workers that only know how long they take."""
