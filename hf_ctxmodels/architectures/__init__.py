"""Architectures that several families share: base models, configurations and architecture-specific heads.

- `TransformerEncoder`, `TransformerDecoder` and `EncoderDecoder` are the base models of the Transformer families.
- `QueryForConditionalGeneration` generates with an encoder and query tokens.
- `LSTMLanguageModel` and `LSTMForCausalLM` are recurrent language models.
- `StaticEmbeddingModel` looks up static word vectors; `PretrainedEmbeddingEncoder` encodes them in context.
- `CharacterModel` encodes the characters of words.
- `RecurrentSentenceEncoder` encodes sentences; `encode_sentences` embeds sentences with any base model.
- `WordEncoder` embeds words in context with any base model.
- `ContinuationScorer` scores continuations of prompts with any language model.

A family derives its classes from these, and defines its layers, defaults and conversion of weights.
"""
