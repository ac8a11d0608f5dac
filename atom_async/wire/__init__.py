"""What the engine and its workers share: rings, wake-ups, messages, handshake.

Imports neither side: no torch, no scheduler.
"""
