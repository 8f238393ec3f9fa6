"""The tests that every attention passes, for attentions from outside the package; needs the extra [testing].

from skyformer.testing import AttentionSuite

class TestMine(AttentionSuite):
    name = "mine"
"""

from skyformer.errors import missing_extra

try:
    import pytest

    # Before the import, so that a failed assertion shows its values.
    pytest.register_assert_rewrite("skyformer.testing.suite")

    from skyformer.testing.suite import AttentionSuite, OptionSuite
except ModuleNotFoundError as error:
    raise missing_extra(error) or error from error

__all__ = ["AttentionSuite", "OptionSuite"]
