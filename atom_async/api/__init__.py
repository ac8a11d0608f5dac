"""The HTTP face: OpenAI's endpoints and those of an operator, on Starlette."""
