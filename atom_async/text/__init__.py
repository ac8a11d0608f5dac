"""Text on the client's side of the engine: tokenizer, chat templates, incremental text, stops, tool calls."""
