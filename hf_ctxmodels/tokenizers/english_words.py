"""Splitting of English text into the words of spaCy, or of the Penn Treebank, by the `tokenizers` library."""

from tokenizers import Regex, pre_tokenizers

_CLITIC = r"(?i:['’](?:s|re|ll|d)|(?<=\w)['’](?:m|ve)|n['’]t)\b"
_UNIT = r"(?i:[kcdmµn]?m|[kmµ]?g|[kmgt]b|kmh|mph|ha|yd|in|ft|lb|oz|t|[ap]m)\b"
_ABBREVIATION = r"a\.m|p\.m|e\.g|i\.e|\p{L}"
_TITLE = r"mr|mrs|ms|dr|prof|rev|gen|sen|rep|gov|st|jr|sr|vs|inc|corp|ltd|co"
_INFIXES = (  # characters within a word
    r"\.(?=\w)",
    r"(?<=\d)[,:](?=\d)",
    rf"(?<=\p{{L}})(?!{_CLITIC})['’](?=\p{{L}})",
    r"-(?![\w-])",
)


def english_splitter(*, treebank: bool, line_breaks: bool = False) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that splits a text into words and punctuation marks.

    Clitics are words ("do n't", "it 's"), also with typographic apostrophes. Unlike spaCy's words, the Treebank's keep
    hyphens, slashes, units ("5km"), and the period of initials and titles ("U.S.", "Mr."), except at the end of a text.

    Args:
        treebank: Split into the words of the Penn Treebank, similar to `NLTKWordTokenizer`, and to the Stanford
            tokenizer, which split GloVe's training text; False for the words of spaCy's English tokenizer, except most
            of its abbreviations and emoticons.
        line_breaks: Line breaks within the text are words, as in fastai.
    """
    contractions = r"can(?=not\b)|gon(?=na\b)|got(?=ta\b)|\w+?(?=n['’]t\b)"
    if treebank:
        infixes = (*_INFIXES, r"[-/](?=\w)")
        rules = [rf"(?i:{contractions}|wan(?=na\b))", rf"\b(?i:(?:\p{{L}}\.)*\p{{L}}|{_TITLE})\.(?!\w)(?!\s*\z)", "``"]
    else:
        infixes = (*_INFIXES, r"(?<=\p{L})-(?=\d)")
        rules = [rf"(?i:{contractions})", rf"\b(?i:{_ABBREVIATION})\.(?!\w)", rf"\d+(?:[.,]\d+)*(?={_UNIT})"]
    word = rf"(?:(?<!\S)-)?\w+(?:(?:{'|'.join(infixes)})\w*)*"
    patterns = [_CLITIC, *rules, word, r"--+|\.\.+|''", r"[^\w\s]", *[r"\n\s*(?=\S)"] * line_breaks]
    return pre_tokenizers.Split(Regex("|".join(patterns)), "removed", invert=True)
