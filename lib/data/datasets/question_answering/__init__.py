"""Questions about short texts, packed for two frozen language models and for what is to make them answer."""
