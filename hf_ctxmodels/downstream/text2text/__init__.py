"""Tasks as text in, text out (Raffel et al. 2020, arXiv 1910.10683): templates, readers and metrics."""

from hf_ctxmodels.downstream.text2text.examples import TextExample
from hf_ctxmodels.downstream.text2text.text_task import TextTask
