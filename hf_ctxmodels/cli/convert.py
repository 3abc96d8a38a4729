"""`hf-ctxmodels convert FORMAT`: convert files of other libraries to a model and its tokenizer."""

from importlib import import_module

from hf_ctxmodels.core.command_line import parse_arguments


def main(module_name: str, class_name: str) -> None:
    """Parse the flags of a conversion class of `hf_ctxmodels.conversion`, and run it; `--help` shows the module's
    docstring."""
    module = import_module(f"hf_ctxmodels.conversion.{module_name}")
    (conversion,) = parse_arguments(getattr(module, class_name), description=module.__doc__)
    conversion.run()
