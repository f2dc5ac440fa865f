"""Names of fused operations, which no test uses."""


class Sequential:
    pass


class FusibleOperation:
    pass
