"""A fault to plant: one line of the package as a slip would write it, and the tests that must catch it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
        what: What is wrong then.
        file: Of the package.
        right: Text that stands in the file once.
        wrong: What stands there in its place.
        tests: The files that pytest is asked to run, from the root of the repository.
        keyword: Which tests of them: pytest's -k.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    keyword: str = ""

    def planted(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: The right text does not stand there exactly once.
        """
        if (count := text.count(self.right)) != 1:
            raise ValueError(f"{self.file}: {self.right!r} stands there {count} times, expected once.")
        return text.replace(self.right, self.wrong)
