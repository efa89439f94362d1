"""Exact decoding: a method drafts tokens, and one pass of the model verifies them."""

from kvjax.exact.from_judge import FromJudge as FromJudge
from kvjax.exact.verified import Verified as Verified
