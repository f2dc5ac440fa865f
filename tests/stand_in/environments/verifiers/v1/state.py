"""The stand-in's state of a rollout."""


class State:
    pass


def state_cls(kind: type) -> type[State]:
    return State
