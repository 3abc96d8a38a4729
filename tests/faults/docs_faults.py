"""Faults of the site in `docs`."""

from fault import Fault

DOCS_FAULTS = [
    Fault(
        "a link of a card leads out of the site",
        "docs/made_pages.py",
        'if known else words.strip("![]")',
        "if known else found[0]",
        ("tests/test_docs.py",),
        "links_of_a_card",
    ),
    Fault(
        "the options of an objective are those without a default of None",
        "docs/made_pages.py",
        "    for entry in entries:\n",
        "    for entry in (each for each in entries if each.default is not None):\n",
        ("tests/test_docs.py",),
        "option",
    ),
    Fault(
        "the flags of a command are those of its first arguments",
        "docs/made_pages.py",
        "    for kind in command_arguments(command):\n",
        "    for kind in command_arguments(command)[:1]:\n",
        ("tests/test_docs.py",),
        "flag",
    ),
]
