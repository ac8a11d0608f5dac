"""atom-async: an event-driven LLM serving engine for agentic traffic."""

__version__ = "0.1.0"
