"""A server that speaks SGLang's HTTP API exactly and holds no model, in a process of its own.

Its tokens cost time and no CPU, and each is a function of the prompt, the seed, its position and the version
of the weights, so that a test can tell which weights made it. Run one by hand with
``python -m anygauge_tests.fake_engine --help``, or from Python with :class:`FakeServer`.
"""

from anygauge_tests.fake_engine.options import Options
from anygauge_tests.fake_engine.process import FakeServer
from anygauge_tests.fake_engine.tokens import EOS, expected

__all__ = ["EOS", "FakeServer", "Options", "expected"]
