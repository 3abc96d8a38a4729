"""Text in which every word tells where it stands."""

WORDS = 3000


def word(number):
    """A word of letters only, so that it is one token: 0 -> "wa", 12 -> "wbc"."""
    return "w" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


def numbered_documents(shape):
    """Documents of sentences of the given lengths, and word number -> document; word n is the n-th of the text."""
    number, documents, home = 0, [], {}
    for index, lengths in enumerate(shape):
        sentences = []
        for length in lengths:
            sentences.append(" ".join(word(number + place) for place in range(length)))
            home.update({number + place: index for place in range(length)})
            number += length
        documents.append(sentences)
    return documents, home
