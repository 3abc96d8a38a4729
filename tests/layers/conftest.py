"""Property tests here have no deadline: how long an example takes depends on what else the machine does."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
