"""Measures of a comparison that need no trained model."""

from hf_ctxmodels.comparison.measures import MinimalPairs
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


def test_frequencies_are_of_the_first_words(tmp_path):
    (tmp_path / "pairs.txt").write_text("a cat sit\na cat sits\n")  # ungrammatical, grammatical
    documents = [["a cat"], ["sits sits", "sits"], ["sit " * 20]]
    tokenizer = CtxWordTokenizer.train([sentence for document in documents for sentence in document], 20, min_count=1)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for words, accuracy in ((5, 1.0), (6, 0.0)):
        measure = MinimalPairs(name="pairs", files=[str(tmp_path / "pairs.txt")], unigram_words=words)
        baselines = measure.baselines(tmp_path / "tokenizer", documents)
        assert baselines["frequency"]["accuracy"] == accuracy
