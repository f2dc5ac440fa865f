"""A cache that does not hold all responses at once: vLLM drops some and computes them anew, and the
engine counts it.
"""

from tests.helpers.launch import torchrun
from tests.helpers.vllm import needs_vllm

pytestmark = needs_vllm


def test_a_small_cache_is_counted_and_changes_no_token(tiny_models, tmp_path):
    options = {"model": str(tiny_models("qwen3", True)), "caches": [1 << 28, 1 << 21]}
    ((roomy, expected), (tight, found)) = torchrun("preemptions", 1, tmp_path, options)[0]
    assert roomy == 0 < tight
    assert found == expected
