"""The allocator of sleeping memory that the tests of the engine use does what the wheel's binary
does.
"""

from tests.cuda_wheels.needs import in_cuda_wheels, printed_by


@in_cuda_wheels
def test_the_stand_in_is_the_binary():
    """Thousands of allocations, frees, sleeps and wakes in random order: the bytes that the driver
    holds, its errors, the error that stays, and what is raised.
    """
    result = printed_by("cumem")
    assert not result["differs"]
    assert result["compared"] > 10_000
