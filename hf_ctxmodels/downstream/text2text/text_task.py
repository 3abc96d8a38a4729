"""Tasks as text (Raffel et al. 2020, section 2.4). An entry of a YAML file describes how rows of a file become inputs
and targets, and how outputs of a model become labels or numbers.

tasks:
  sst2:
    file: {train: SST-2/train.tsv.gz, validation: SST-2/dev.tsv}
    input: "sst2 sentence: {sentence}"
    target: "{label}"
    labels: {0: negative, 1: positive}
    metrics: [accuracy]
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data.table_files import MissingColumnError, Row, is_label, parse_number, require_labels
from hf_ctxmodels.downstream.tasks.question_answering import has_answers
from hf_ctxmodels.downstream.text2text.examples import Template, TextExample, field_value, select_rows, value_text
from hf_ctxmodels.downstream.text2text.metrics import DEFAULT_METRICS, METRICS, refers_to
from hf_ctxmodels.downstream.text2text.readers import FORMATS, RowRequest, read_rows
from hf_ctxmodels.downstream.text2text.task_files import TaskEntry, find_task_file, read_entries

Kind = Literal["classification", "number", "text"]
Files = str | Path | Sequence[str]
"""A split of a task, a file, or the files of the format `parallel`."""

SPLITS = ("train", "validation", "test")
TASK_KEYS = (
    *("file", "format", "input", "target", "labels", "choices", "round", "no_answer", "label", "group"),
    *("train_filter", "expand", "one_per_reference", "strip_tags", "postprocess", "metrics"),
)
"""Keys of an entry of a YAML file."""


@dataclass(frozen=True)
class TextTask:
    """A task as text.

    The target is free text, unless there are `labels` (classification) or a step `round` (number).

    Args:
        name: Name of the task.
        input: Template of the input, with a prefix that names the task.
        target: Template of the target. With `labels` or `round` it is one field, the label or number. A field with a
            list has several accepted references, and the first is the target.
        files: Files by split, one of `SPLITS`.
        format: A key of `FORMATS`; None for the suffix of the file.
        labels: Label strings by the values of the target field, which may contain fields; or a field with the
            list of an example's choices, whose index (from 0) or text is the value of the target field.
        choices: A field with a list of texts from which the target is chosen if outputs are ranked.
        round: The step of numbers, 0.2 for STS-B.
        no_answer: The target if a list of references is empty; with None, an empty list is an error.
        label: A field that is true if the target is the referent of the pronoun, for `postprocess: referent`.
        group: Template of `TextExample.group`.
        train_filter: Field -> value that rows of the training split must have; other rows are skipped.
        expand: See `RowRequest.expand`.
        one_per_reference: Whether each reference is an example of the training split.
        strip_tags: Whether tags such as `<br>` are removed from the inputs.
        postprocess: "referent" (WSC) or None.
        metrics: Keys of `METRICS`, the main one first; by default `DEFAULT_METRICS` of the kind.
        location: `file:line` of the entry.
    """

    name: str
    input: str
    target: str
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    format: str | None = None
    labels: Mapping[str, str] | str | None = None
    choices: str | None = None
    round: float | None = None
    no_answer: str | None = None
    label: str | None = None
    group: str | None = None
    train_filter: Mapping[str, str] = field(default_factory=dict)
    expand: str = ""
    one_per_reference: bool = False
    strip_tags: bool = False
    postprocess: str | None = None
    metrics: tuple[str, ...] = ()
    location: str = ""

    def __post_init__(self) -> None:
        if not self.metrics:
            object.__setattr__(self, "metrics", DEFAULT_METRICS[self.metric_kind])
        self._validate()

    @property
    def kind(self) -> Kind:
        """The kind of the targets."""
        return "classification" if self.labels is not None else "number" if self.round is not None else "text"

    @property
    def metric_kind(self) -> str:
        """The kind of the targets, or "referent", as in `Metric.kinds`."""
        return "referent" if self.postprocess == "referent" else self.kind

    @classmethod
    def from_yaml(cls, file: str | Path, folder: str | Path | None = None) -> dict[str, "TextTask"]:
        """The tasks of a YAML file, of a packaged file ("glue") or one packaged task ("sst2").

        Args:
            folder: Base directory of relative paths; None for the file's `folder`, or the current directory.

        Raises:
            CtxError: The file cannot be read, or a key or value is invalid; the message names file, line and key.
        """
        path, name = find_task_file(str(file), "text2text")
        return {
            entry.name: parse_entry(entry)
            for entry in read_entries(path, folder, "file of tasks as text", TASK_KEYS, name)
        }

    def read(self, file: Files, *, is_training: bool | None = None, labeled: bool = True) -> list[TextExample]:
        """The examples of a split or file in file order.

        Args:
            file: A split of `files`, a file, or the files of the format `parallel`.
            is_training: Whether `train_filter` and `one_per_reference` apply; None: if the split is "train".
            labeled: Whether the targets are read; see `has_labels`.

        Raises:
            CtxError: There is no such file, a field is missing, a label is unknown, two choices of an example are
                equal, or a target is empty; the message names the line.
        """
        if is_training is None:
            is_training = list([file] if isinstance(file, str | Path) else file) == ["train"]
        rows = self.read_rows(file, is_training=is_training, labeled=labeled)
        return [example for row in rows for example in self.make_examples(row, is_training, labeled)]

    def has_labels(self, file: Files) -> bool:
        """Whether a split or file has targets: not if their fields are missing, or empty or -1 in all rows."""
        files = self._existing_files(file)
        if self.format == "squad":
            return has_answers(files[0])
        fields = self._templates[self._label_key].fields
        try:
            rows = read_rows(RowRequest(files, self._fields(False), self.expand), self.format)
        except MissingColumnError:
            return False
        values = [[row.values.get(name) for name in fields] for row in rows]
        if self.format == "conll" and values == [[row.values["1"]] * len(fields) for row in rows]:
            return False  # the words are the last column
        if self._has_label_minus_one:
            return any(value not in (None, "") for row_values in values for value in row_values)
        return any(is_label(value) and set(str(value).split()) != {"_"} for items in values for value in items)

    def read_rows(
        self, file: Files, extra_fields: Sequence[str] = (), *, is_training: bool = False, labeled: bool = True
    ) -> list[Row]:
        """The rows of a split or file in file order; arguments and errors as for `read`.

        Args:
            extra_fields: Fields to read that are not in the templates.
            is_training: Whether `train_filter` applies.
            labeled: Whether the fields of the target are read.
        """
        files = self._existing_files(file)
        fields = tuple(dict.fromkeys((*self._fields(is_training, labeled), *extra_fields)))
        rows = read_rows(RowRequest(files, fields, self.expand, labeled), self.format)
        if labeled and self.kind != "text" and not self._has_label_minus_one:
            require_labels(rows, self._templates["target"].fields[0])
        selected = list(select_rows(rows, self.train_filter if is_training else {}))
        if not selected:
            raise CtxError(
                f"No example has {dict(self.train_filter)}.",
                location=files[0],
                hint="correct train_filter in the task.",
            )
        return selected

    def _existing_files(self, file: Files) -> tuple[str, ...]:
        """The files of a split, or the files themselves; raises CtxError if one does not exist."""
        files = (str(file),) if isinstance(file, str | Path) else tuple(map(str, file))
        files = self.files.get(files[0], files) if len(files) == 1 else files
        if files[0] in SPLITS:
            raise CtxError(
                f"The task {self.name} has no file of the split {files[0]!r}.",
                location=self.location or None,
                hint=f"add it to `file`, or use one of: {', '.join(self.files) or 'a path'}.",
            )
        if missing := [name for name in files if not (is_url(name) or Path(local_path(name)).is_file())]:
            raise CtxError(
                f"The task {self.name} has no such file: {missing[0]}.",
                location=self.location or None,
                hint="correct the path, or pass its base directory as --tasks_folder.",
            )
        return files

    def parse(self, example: TextExample, output: str) -> Any:
        """The label of a generated text: the index of a choice, a number, 1 or 0 for a correct or wrong referent, or a
        text; None for an empty or unknown output.

        If no choice equals the output, case and spaces are ignored, which tokenizers may change.
        """
        output = output.strip()
        if self.kind == "number":
            return parse_number(output)
        if self.postprocess == "referent":
            return refers_to(output, example.target)
        if self.kind == "text":
            return output or None
        if output in example.choices:
            return example.choices.index(output)
        matches = [index for index, choice in enumerate(example.choices) if _normalize(choice) == _normalize(output)]
        return matches[0] if len(matches) == 1 else None

    def label_value(self, prediction: Any) -> Any:
        """The value in a file of a label, number or text of `parse`."""
        if isinstance(self.labels, Mapping) and prediction is not None:
            return list(self.labels)[prediction]
        return prediction

    def score(self, examples: Sequence[TextExample], outputs: Sequence[str]) -> dict[str, float]:
        """The metrics of generated texts, the main one first, and `unknown_outputs`, the share of outputs that cannot
        be parsed as label, number or text and count as wrong."""
        if len(examples) != len(outputs) or not examples:
            raise CtxError(
                f"{len(examples)} examples, {len(outputs)} outputs.", hint="use one output for each example."
            )
        predictions = [self.parse(example, output) for example, output in zip(examples, outputs, strict=True)]
        scores: dict[str, float] = {}
        for name in self.metrics:
            scores |= METRICS[name].function(examples, predictions)
        return scores | {"unknown_outputs": predictions.count(None) / len(predictions)}

    @cached_property
    def _templates(self) -> dict[str, Template]:
        texts = {"input": self.input, "target": self.target}
        if isinstance(self.labels, Mapping):
            texts |= {f"labels, {value}": text for value, text in self.labels.items()}
        for name in ("labels", "choices", "label", "group"):
            if isinstance(text := getattr(self, name), str):
                texts[name] = text
        return {name: Template(text, f"{self.location}, {name}") for name, text in texts.items()}

    @property
    def _has_label_minus_one(self) -> bool:
        """Whether -1, which marks missing labels in other files, is a label."""
        return isinstance(self.labels, Mapping) and "-1" in self.labels

    @property
    def _label_key(self) -> str:
        """The template with the label: of a referent the label, if there is one, else the target."""
        return "target" if self.label is None else "label"

    def _fields(self, is_training: bool, labeled: bool = True) -> tuple[str, ...]:
        """All fields that the templates use; unless `labeled`, without the fields of the label."""
        keys = [key for key in self._templates if labeled or key != self._label_key]
        names = [name for key in keys for name in self._templates[key].fields]
        return tuple(dict.fromkeys(names + (list(self.train_filter) if is_training else [])))

    def _validate(self) -> None:
        def fail(message: str, key: str, hint: str) -> None:
            raise CtxError(f"The task {self.name}: {message}.", location=f"{self.location}, {key}", hint=hint)

        templates = self._templates
        if self.format is not None and self.format not in FORMATS:
            fail(f"unknown format {self.format!r}", "format", f"use one of {', '.join(FORMATS)}.")
        if self.labels is not None and self.round is not None:
            fail("it has labels and numbers", "round", "remove labels or round.")
        if self.round is not None and not self.round > 0:
            fail(f"round is {self.round}, expected a step above 0", "round", "use 0.2, for example.")
        if not templates["input"].fields:
            fail("the input has no field", "input", 'write input: "prefix: {column}".')
        if self.kind != "text" and templates["target"].only_field is None:
            fail("the target is not a single field", "target", 'write target: "{column}".')
        for key in ("labels", "choices", "label"):
            if key in templates and templates[key].only_field is None:
                fail(f"{key} is not a field", key, f'write {key}: "{{column}}".')
        if isinstance(self.labels, Mapping):
            self._validate_labels(self.labels)
        if self.postprocess not in (None, "referent") or (self.postprocess and self.kind != "text"):
            fail(f"unknown postprocess {self.postprocess!r}", "postprocess", "use referent for pronouns in free text.")
        if self.label is not None and self.postprocess != "referent":
            fail("label is only read with postprocess: referent", "label", "use `labels` for label strings.")
        for key in ("choices", "no_answer", "one_per_reference"):
            if self.kind != "text" and getattr(self, key):
                fail(f"a {self.kind} task does not read {key}", key, "remove the line.")
        self._validate_metrics()

    def _validate_metrics(self) -> None:
        kind = self.metric_kind
        error = None
        if len({"squad", "exact_match", "entities"} & set(self.metrics)) > 1:
            error = "two of its metrics have a score of the same name"
        for name in self.metrics:
            if name not in METRICS:
                error = f"unknown metric {name!r}"
            elif kind not in METRICS[name].kinds:
                error = f"the metric {name} is for the kind {' or '.join(METRICS[name].kinds)}, not {kind}"
            elif name == "mse" and name == self.metrics[0]:
                error = "a lower mse is better, so it cannot be the main metric"
            elif METRICS[name].is_binary and not (isinstance(self.labels, Mapping) and len(self.labels) == 2):
                error = f"the metric {name} needs two labels"
            elif METRICS[name].needs_group and self.group is None:
                error = f"the metric {name} needs a group"
        if error:
            names = ", ".join(name for name, metric in METRICS.items() if kind in metric.kinds)
            raise CtxError(
                f"The task {self.name}: {error}.", location=f"{self.location}, metrics", hint=f"use some of: {names}."
            )

    def _validate_labels(self, labels: Mapping[str, str]) -> None:
        texts: dict[str, str] = {}
        for value, text in labels.items():
            location = f"{self.location}, labels, {value}"
            if not text.strip() or text != text.strip():
                raise CtxError(
                    f"The label string {text!r} is empty, or has spaces at its ends.",
                    location=location,
                    hint="correct it.",
                )
            if text in texts:
                raise CtxError(
                    f"The labels {texts[text]} and {value} have the same string {text!r}.",
                    location=location,
                    hint="change one of them.",
                )
            texts[text] = value
        if len(labels) < 2:
            raise CtxError("There are fewer than two labels.", location=f"{self.location}, labels", hint="add labels.")

    def make_examples(self, row: Row, is_training: bool = False, labeled: bool = True) -> list[TextExample]:
        """The examples of a row: one, or in training with `one_per_reference` one for each reference; raises CtxError
        as `read`."""
        input_text = self._templates["input"].render(row)
        if self.strip_tags:
            input_text = strip_tags(input_text)
        choices = self._choices(row)
        group = self._templates["group"].render(row) if self.group is not None else None
        if not labeled:
            referent = "" if self.label is None else self._references(row)[0]
            return [TextExample(input_text, referent, (), None, choices, row.location, group)]
        label, targets = self._label_and_targets(row, choices)
        selected = targets if self.one_per_reference and is_training else targets[:1]
        return [TextExample(input_text, text, targets, label, choices, row.location, group) for text in selected]

    def _label_and_targets(self, row: Row, choices: tuple[str, ...]) -> tuple[int | float | None, tuple[str, ...]]:
        """`label` and `targets` of a row's examples, see `TextExample`.

        | `metric_kind` | label | targets |
        |---|---|---|
        | classification | index of a choice | the choice |
        | number | the number | the number as a text, rounded to a multiple of `round` |
        | referent | 1 if the field `label` is true or there is none, else 0 | the references |
        | text | None | the references |
        """
        if self.kind == "classification":
            index = self._label_index(row, choices)
            return index, (choices[index],)
        if self.round is not None:
            value = field_value(row, self._templates["target"].fields[0])
            if (number := parse_number(value)) is None:
                raise CtxError(
                    f"Expected a number, got {value!r}.", location=row.location, hint="correct the line or the target."
                )
            return number, (round_to_step(number, self.round),)
        references = self._references(row)
        if self.metric_kind == "text":
            return None, references
        is_correct = field_value(row, self._templates["label"].fields[0]) if self.label is not None else True
        return int(value_text(is_correct).lower() in ("true", "1")), references

    def _choices(self, row: Row) -> tuple[str, ...]:
        """The label strings of a row; raises CtxError if two are equal."""
        if isinstance(self.labels, Mapping):
            choices = [self._templates[f"labels, {value}"].render(row).strip() for value in self.labels]
        elif template := self._templates.get("labels") or self._templates.get("choices"):
            value = field_value(row, template.fields[0])
            choices = [str(item).strip() for item in value] if isinstance(value, list) else []
            if len(choices) < 2:
                raise CtxError(
                    f"The choices are {str(value)[:80]!r}, expected a list of two or more.",
                    location=row.location,
                    hint="correct the line, or use another field.",
                )
        else:
            return ()
        repeated = [choice for index, choice in enumerate(choices) if choice in choices[:index] or not choice]
        if repeated:
            raise CtxError(
                f"The choice {repeated[0]!r} is empty or occurs twice.", location=row.location, hint="correct the line."
            )
        return tuple(choices)

    def _label_index(self, row: Row, choices: tuple[str, ...]) -> int:
        """The index in `choices` of the target field's value, which is a key of `labels`, or, if `labels` is a field,
        an index or the text of a choice."""
        name = self._templates["target"].fields[0]
        value = field_value(row, name)
        text = value_text(value)
        if isinstance(self.labels, Mapping):
            # YAML's booleans may be capitalized
            values = [key.lower() if isinstance(value, bool) else key for key in self.labels]
            expected = ", ".join(self.labels)
        else:
            values = [str(index) for index in range(len(choices))]
            if isinstance(value, str) and text.strip() in choices:
                values, text = list(choices), text.strip()
            expected = f"0 to {len(choices) - 1} or the text of a choice"
        if text not in values:
            raise CtxError(
                f"Unknown label {text!r} in {name!r}, expected {expected}.",
                location=row.location,
                hint=f"correct the line, or the labels of the task {self.name}.",
            )
        return values.index(text)

    def _references(self, row: Row) -> tuple[str, ...]:
        """The different texts of the target: of a field with a list its items, or `no_answer` if it is empty."""
        template = self._templates["target"]
        value = field_value(row, template.only_field) if template.only_field else None
        texts = [str(item) for item in value] if isinstance(value, list) else [template.render(row)]
        texts = list(dict.fromkeys(text.strip() for text in texts)) or [self.no_answer or ""]
        if not all(texts):
            raise CtxError(
                "The target is empty.",
                location=row.location,
                hint="remove the line, or set no_answer in the task to the text of no answer.",
            )
        return tuple(texts)


def round_to_step(number: float, step: float) -> str:
    """A number rounded to a multiple of a step, with the decimals of the step (Raffel et al. 2020, section 2.4). A
    number in the middle is rounded to the even multiple.

    >>> round_to_step(2.5, 0.2)
    '2.4'
    """
    exponent = Decimal(str(step)).normalize().as_tuple().exponent
    multiple = round(Fraction(str(number)) / Fraction(str(step))) * Fraction(str(step))
    return f"{float(multiple):.{max(0, -int(exponent))}f}"


def strip_tags(text: str) -> str:
    """A text without tags such as `<b>`; `<br>` is a space.

    >>> strip_tags("<b>One</b><br>two")
    'One two'
    """
    return re.sub(r"</?[a-zA-Z][^<>]*>", "", re.sub(r"<br\s*/?>", " ", text))


def _normalize(text: str) -> str:
    return "".join(text.casefold().split())


def parse_entry(task_entry: TaskEntry) -> TextTask:
    """The task of an entry, from its `TASK_KEYS`; raises CtxError if a key is missing or a value is invalid."""
    entry, name, location, folder = task_entry.mapping, task_entry.name, task_entry.location, task_entry.folder

    def fail(key: str, expected: str) -> CtxError:
        message = f"The task {name}: {key} is {str(values[key])[:80]!r}, expected {expected}."
        return entry.error(key, message, "correct it; see the example in the documentation of tasks as text.")

    values: dict[str, Any] = {key: entry.text(key) for key in entry.nodes if key in TASK_KEYS}
    entry.require("input", "target")
    for key, value in values.items():
        if key in ("file", "train_filter", "metrics"):
            continue
        if not (isinstance(value, str) or (key == "labels" and isinstance(value, dict))):
            raise fail(key, "a text")
    labels = values.get("labels")
    if isinstance(labels, dict) and not all(isinstance(text, str) for text in labels.values()):
        raise fail("labels", "values and their strings")
    for key in ("one_per_reference", "strip_tags"):
        if key in values:
            if values[key].lower() not in ("true", "false"):
                raise fail(key, "true or false")
            values[key] = values[key].lower() == "true"
    if "round" in values:
        if (step := parse_number(values["round"])) is None:
            raise fail("round", "a number")
        values["round"] = step
    if isinstance(values.get("file"), dict):
        entry.mapping("file", f"`file` of the task {name}", SPLITS)
    for key in ("file", "train_filter"):
        if key in values and not isinstance(values[key], dict):
            raise fail(key, "a mapping such as {train: FILE, validation: FILE}" if key == "file" else "a mapping")
    metrics = values.get("metrics", [])
    values["metrics"] = tuple([metrics] if isinstance(metrics, str) else metrics)
    files = {
        split: tuple(
            path if is_url(path) else str(folder / path) for path in ([paths] if isinstance(paths, str) else paths)
        )
        for split, paths in values.pop("file", {}).items()
    }
    return TextTask(name=name, files=files, location=location, **values)
