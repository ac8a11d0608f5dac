"""Decisions: plain synchronous code over state with one owner. No awaits, locks, I/O, clock or torch."""
