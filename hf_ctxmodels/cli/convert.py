"""`hf-ctxmodels convert FORMAT`: convert files of other libraries to a model and its tokenizer."""

from importlib import import_module

from hf_ctxmodels.core.command_line import parse_arguments


def main(module_name: str, class_name: str) -> None:
    """Run the conversion of a class in a module of `hf_ctxmodels.conversion`, whose docstring begins `--help`."""
    module = import_module(f"hf_ctxmodels.conversion.{module_name}")
    (conversion,) = parse_arguments(getattr(module, class_name), description=module.__doc__)
    conversion.run()
