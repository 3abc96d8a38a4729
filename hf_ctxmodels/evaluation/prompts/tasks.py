"""Prompt tasks: YAML entries in the notation of text-to-text tasks -> prompts with examples in the context.

    tasks:
      sst2:
        file: {train: SST-2/train.tsv.gz, validation: SST-2/dev.tsv}
        input: "{sentence}\\nQuestion: Is this sentence positive or negative?\\nAnswer:"
        target: "{label}"
        labels: {0: negative, 1: positive}

`file.validation` is evaluated; the examples in the contexts are from `file.train`, if given, else from
`file.validation`. A prompt is formatted as in lm-evaluation-harness: the `description`, then input, `separator`, target
and `example_separator` of each example, then the input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.core.yaml_mapping import YamlMapping
from hf_ctxmodels.data.table_files import Row
from hf_ctxmodels.downstream.text2text.examples import Template, TextExample, value_text
from hf_ctxmodels.downstream.text2text.task_files import find_task_file, read_entries
from hf_ctxmodels.downstream.text2text.text_task import TASK_KEYS, TextTask, parse_entry
from hf_ctxmodels.evaluation.clozes import Cloze

Scoring = Literal["full", "partial", "likelihood", "cloze"]
_MASK, _SEGMENT_END = "[MASK]", "[SEP]"  # in the input of a cloze


@dataclass(frozen=True)
class PromptExample:
    """An example of a prompt task.

    Attributes:
        text: Input, choices and targets.
        suffix: Text after the answer.
        segments: Segments of a cloze, see `Cloze`.
    """

    text: TextExample
    suffix: str = ""
    segments: tuple[tuple[str, ...], ...] = ()

    @property
    def content(self) -> "PromptExample":
        """The example without its location, to compare it with others."""
        return replace(self, text=replace(self.text, location=""))


@dataclass(frozen=True)
class PromptTask:
    """A task whose inputs are prompts.

    Attributes:
        text: Files, templates, labels and metrics, see `TextTask`.
        scoring: How answers are scored. "full": the likelihood of each choice after the input, or a generated text if
            there are no choices. "partial": the likelihood of the suffix after input and choice (Trinh & Le 2018,
            arXiv 1806.02847, section 3.1). "likelihood": the likelihood of the target. "cloze": the probability of each
            label string at the `[MASK]` of the input, which may have two segments separated by `[SEP]` (PET; see
            `score_clozes`).
        suffix: Template of the text after the answer, such as the rest of a sentence with a blank.
        replace: Field -> {value: replacement}, before templates are filled.
        description: Text before the first example.
        separator, example_separator: Between input and answer, and after an example.
        calibration: Context for the calibrated likelihood (Brown et al. 2020, section 2.4).
        max_new_tokens: Maximum number of tokens of a generated answer.
        version: Version of the task in tables of results.
    """

    text: TextTask
    scoring: Scoring = "full"
    suffix: str = ""
    replace: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    description: str = ""
    separator: str = " "
    example_separator: str = "\n\n"
    calibration: str = "Answer:"
    max_new_tokens: int = 32
    version: int = 1

    def __post_init__(self) -> None:
        message = None
        if self.scoring not in get_args(Scoring):
            message = f"unknown scoring {self.scoring!r}, expected {', '.join(get_args(Scoring))}"
        elif self.text.kind == "number":
            message = "a prompt has labels, choices or a text as answer, not a number"
        elif self.scoring == "cloze" and (self.text.kind != "classification" or self.suffix):
            message = "a cloze has labels, and no suffix"
        elif self.scoring == "cloze" and (self.text.input.count(_MASK) != 1 or self.text.input.count(_SEGMENT_END) > 1):
            message = f"the input of a cloze has one {_MASK} and at most one {_SEGMENT_END}"
        elif self.scoring == "partial" and not (self.suffix and self.text.kind == "classification"):
            message = "partial scoring needs labels, and a suffix whose likelihood is compared"
        elif self.scoring == "likelihood" and self.text.kind != "text":
            message = "the likelihood of the target needs a task without labels"
        elif self.text.choices is not None:
            message = "the choices of a prompt are `labels`, not `choices`"
        elif self.output == "text" and "\n" in self.separator:
            message = "a generated answer ends at a line break, which belongs to `input`, not to `separator`"
        elif self.max_new_tokens < 1:
            message = f"max_new_tokens is {self.max_new_tokens}, expected at least 1"
        elif pair := self._prefix_pair():
            message = f"the choice {pair[0]!r} begins {pair[1]!r}, and is never less likely; change it or add a suffix"
        if message:
            raise CtxError(f"The task {self.name}: {message}.", location=self.text.location, hint="correct the task.")

    def _prefix_pair(self) -> tuple[str, str] | None:
        """Two label strings, of which the first has the first words of the second, if only they are scored."""
        if not isinstance(self.text.labels, Mapping) or self.scoring != "full" or self.suffix:
            return None
        pairs = permutations(self.text.labels.values(), 2)
        return next((pair for pair in pairs if pair[1].startswith(f"{pair[0]} ")), None)

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.text.name

    @property
    def output(self) -> Literal["choice", "likelihood", "text"]:
        """The model output that is scored: the likelihoods of choices, the likelihood of the target, or a text."""
        if self.scoring == "likelihood":
            return "likelihood"
        return "choice" if self.text.kind == "classification" else "text"

    def paths(self, file: str) -> tuple[str, ...]:
        """Absolute paths of a split, or of a file."""
        names = self.text.files.get(file, (file,))
        return tuple(name if is_url(name) else str(Path(local_path(name)).resolve()) for name in names)

    def read(self, file: str, *, is_pool: bool = False, labeled: bool = True) -> list[PromptExample]:
        """Read the examples of a split or a file.

        Args:
            is_pool: Whether the examples are for contexts; `train_filter` of the task then applies.
            labeled: Whether the targets are read; see `TextTask.has_labels`.

        Raises:
            CtxError: As `TextTask.read`, or a value of a field in `replace` has no replacement.
        """
        suffix = Template(self.suffix, f"{self.text.location}, suffix")
        examples = []
        target_fields = () if labeled else Template(self.text.target, self.text.location).fields
        replaced = [name for name in self.replace if name not in target_fields]
        for row in self.text.read_rows(file, (*suffix.fields, *replaced), is_training=is_pool, labeled=labeled):
            row = self._replace_values(row, replaced)
            segments = self._segments(row) if self.scoring == "cloze" else ()
            texts = self.text.make_examples(row, labeled=labeled)
            examples += [PromptExample(text, suffix.render(row), segments) for text in texts]
        return examples

    def _segments(self, row: Row) -> tuple[tuple[str, ...], ...]:
        """The segments of the input of a cloze."""
        location = f"{self.text.location}, input"
        return tuple(
            tuple(Template(text, location).render(row) for text in segment.split(_MASK))
            for segment in self.text.input.split(_SEGMENT_END)
        )

    def cloze(self, context: str, example: PromptExample) -> Cloze:
        """The cloze of an example after a context."""
        (first, *texts), *segments = example.segments
        return Cloze(((context + first, *texts), *segments), example.text.choices)

    def _replace_values(self, row: Row, names: Sequence[str]) -> Row:
        values: dict[str, Any] = dict(row.values)
        for name in names:
            replacements = self.replace[name]
            value = value_text(values.get(name))
            if value not in replacements:
                raise CtxError(
                    f"The field {name!r} is {value!r}, expected {', '.join(replacements)}.",
                    location=row.location,
                    hint="correct the line, or `replace` of the task.",
                )
            values[name] = replacements[value]
        return Row(values, row.location)

    def requests(self, context: str, example: PromptExample) -> list[tuple[str, str]]:
        """Contexts and continuations whose likelihoods are the scores of the choices, or of the target."""
        prompt, answers = context + example.text.input, example.text.choices or example.text.targets[:1]
        if self.scoring == "partial":
            return [(f"{prompt}{self.separator}{answer}", example.suffix) for answer in answers]
        return [(prompt, f"{self.separator}{answer}{example.suffix}") for answer in answers]

    def demonstration(self, example: PromptExample) -> str:
        """An example with its answer, as in the context of another example."""
        if self.scoring == "cloze":
            texts = (example.text.target.join(segment).strip() for segment in example.segments)
            return f"{' '.join(texts)}{self.example_separator}"
        return f"{example.text.input}{self.separator}{example.text.target}{example.suffix}{self.example_separator}"

    def contexts(
        self,
        examples: Sequence[PromptExample],
        pool: Sequence[PromptExample],
        num_shots: int,
        seed: int,
        *,
        is_same_file: bool = False,
        shared: bool = False,
    ) -> list[str]:
        """Context of each example: the description and `num_shots` examples with their answers.

        One `Random(seed)` samples examples of the pool for all examples in order, as in lm-evaluation-harness.

        Args:
            examples: Evaluated examples.
            pool: Examples for the contexts.
            is_same_file: Whether both come from one file; then an example never occurs in its own context.
            shared: Use one sample for all examples, from the pool without the evaluated examples.

        Raises:
            CtxError: The pool is too small.
        """
        if num_shots == 0:
            return [self.description] * len(examples)
        evaluated = {example.content for example in examples} if is_same_file and shared else set()
        candidates = [example for example in pool if example.content not in evaluated]
        num_sampled = num_shots + (is_same_file and not shared)
        self._check_pool(len(candidates), num_sampled, num_shots)
        random = Random(seed)
        if shared:
            return [self._context(random.sample(candidates, num_shots))] * len(examples)
        contexts = []
        for example in examples:
            shots = random.sample(candidates, num_sampled)
            if is_same_file:
                content = example.content
                shots = [shot for shot in shots if shot.content != content][:num_shots]
                if len(shots) < num_shots:  # the file repeats the example
                    different = [shot for shot in candidates if shot.content != content]
                    self._check_pool(len(different), num_shots, num_shots)
                    shots = random.sample(different, num_shots)
            contexts.append(self._context(shots))
        return contexts

    def _check_pool(self, size: int, num_sampled: int, num_shots: int) -> None:
        """Raise CtxError if a pool has fewer examples than are sampled for contexts."""
        if size < num_sampled:
            raise CtxError(
                f"{size} examples are too few for contexts with {num_shots}.",
                location=f"task {self.name}",
                hint="use fewer --shots, add file.train to the task, or evaluate a part of the file by --max_examples.",
            )

    def _context(self, shots: Sequence[PromptExample]) -> str:
        return self.description + "".join(map(self.demonstration, shots))


_KEYS = tuple(option.name for option in fields(PromptTask) if option.name != "text")


def read_tasks(file: str | Path, folder: str | Path | None = None, name: str | None = None) -> dict[str, PromptTask]:
    """The tasks of a YAML file by name, or only the task `name`.

    Args:
        folder: Folder of relative paths; None for the file's `folder`, or the current directory.

    Raises:
        CtxError: The file cannot be read, or a key or value is invalid; the message names file, line and key.
    """
    tasks = {}
    for entry in read_entries(file, folder, "file of prompt tasks", (*TASK_KEYS, *_KEYS), name):
        options = {key: _option(entry.mapping, key) for key in _KEYS if key in entry.mapping.nodes}
        tasks[entry.name] = PromptTask(parse_entry(entry), **options)
    return tasks


def _option(entry: YamlMapping, key: str) -> Any:
    if key in ("max_new_tokens", "version"):
        return entry.value(key, int)
    if key != "replace":
        return entry.value(key, str)
    value = entry.text(key)
    if not isinstance(value, dict) or not all(isinstance(texts, dict) for texts in value.values()):
        message = f"replace is {str(value)[:80]!r}, expected a mapping for each field."
        raise entry.error(key, message, "write replace: {FIELD: {VALUE: REPLACEMENT}}.")
    return value


def find_tasks(name: str, folder: str | Path | None = None) -> list[PromptTask]:
    """The tasks of a YAML file, of a packaged file or one packaged task; raises CtxError if there is none, and as
    `read_tasks`."""
    path, task = find_task_file(name, "prompts")
    return list(read_tasks(path, folder, task).values())
