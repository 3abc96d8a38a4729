"""The last steps of a model: its files in one directory, opened by processes that know nothing of this one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError

# Both read texts from standard input, 64 tokens of each as in training, and write their labels; the second does not
# import this package.
_CLASSIFY = """
import json, sys
{imports}
from transformers import pipeline
from transformers.utils import logging
logging.set_verbosity_error()
logging.disable_progress_bar()
classify = pipeline("text-classification", sys.argv[1]{options})
labels = [row["label"] for row in classify(json.load(sys.stdin), truncation=True, max_length=64)]
print(json.dumps(labels))
"""
WITH_IMPORT = _CLASSIFY.format(imports="import hf_ctxmodels", options="")
WITH_REMOTE_CODE = _CLASSIFY.format(imports="", options=", trust_remote_code=True")


def labels_from(program: str, directory: Path, texts: Sequence[str]) -> list[str]:
    """The labels that a classifier gives texts, opened in an interpreter of its own with an empty cache.

    Args:
        program: `WITH_IMPORT` or `WITH_REMOTE_CODE`.
        directory: Of the classifier.
        texts: What is classified.

    Raises:
        CtxError: The program failed.
    """
    with tempfile.TemporaryDirectory() as home:
        result = subprocess.run(
            [sys.executable, "-c", program, str(directory.resolve())],
            input=json.dumps(list(texts)),
            env={**os.environ, "HF_HOME": home, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        last = (result.stderr.splitlines() or ["it said nothing"])[-1]
        raise CtxError(f"The published model was not opened: {last}", location=str(directory), hint="report this.")
    return json.loads(result.stdout.splitlines()[-1])
