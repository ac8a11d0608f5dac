"""The parts of the sampler: settings by slot, penalties, truncation, draws, log-probabilities."""
