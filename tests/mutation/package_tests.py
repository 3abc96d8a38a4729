"""Which tests must kill the mutants of each subpackage."""

# Subpackage -> files and folders of tests, the closest first.
PACKAGE_TESTS: dict[str, tuple[str, ...]] = {
    "core": ("tests/core", "tests/models/test_registration.py", "tests/models/test_common_errors.py", "tests/hub"),
    "layers": ("tests/layers", "tests/models"),
    "tokenizers": ("tests/tokenizers",),
    "heads": ("tests/models/test_heads.py", "tests/inference/test_generation.py", "tests/layers", "tests/models"),
    "architectures": ("tests/architectures", "tests/models"),
    "models": ("tests/models", "tests/parity"),
    "data": ("tests/data", "tests/downstream/tasks"),
    "objectives": ("tests/objectives",),
    "training": ("tests/training", "tests/downstream"),
    "downstream": ("tests/downstream", "tests/cli"),
    "compression": ("tests/compression", "tests/ecosystem"),
    "evaluation": ("tests/evaluation", "tests/cli"),
    "inference": ("tests/inference", "tests/test_export.py", "tests/models", "tests/cli"),
    "conversion": ("tests/conversion", "tests/parity"),
    "analysis": ("tests/analysis",),
    "hub": ("tests/hub",),
    "comparison": ("tests/comparison",),
    "demo": ("tests/cli/test_demo.py",),
    "cli": ("tests/test_cli.py", "tests/cli"),
}
