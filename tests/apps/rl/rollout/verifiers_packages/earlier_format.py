"""An environment as verifiers had them until 0.3."""

import verifiers as vf


def load_environment(**options: object) -> object:
    return vf.SingleTurnEnv(**options)
