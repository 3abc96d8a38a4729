"""Numbers that several rooms agree on."""

IGNORED = -100  # the target that no loss counts, as in torch's cross-entropy
