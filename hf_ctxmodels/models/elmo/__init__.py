"""ELMo (Peters et al. 2018): words from their characters, in a language model of both directions."""
