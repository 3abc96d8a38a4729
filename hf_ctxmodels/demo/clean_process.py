"""Classification in a new process, which opens a published model as a user would."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError

# The programs read texts from standard input, truncate them to 64 tokens as in training, and print their labels.
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


def classify_in_clean_process(program: str, directory: Path, texts: Sequence[str]) -> list[str]:
    """Predict labels with a classifier that a new process with an empty cache opens.

    Args:
        program: `WITH_IMPORT` or `WITH_REMOTE_CODE`.
        directory: Directory of the classifier.
        texts: Texts to classify.

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
        message = (result.stderr.splitlines() or ["no error message"])[-1]
        raise CtxError(f"The published model cannot be opened: {message}", location=str(directory), hint="report this.")
    return json.loads(result.stdout.splitlines()[-1])
