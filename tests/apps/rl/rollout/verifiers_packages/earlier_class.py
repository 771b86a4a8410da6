"""An environment that extends a class which verifiers had until 0.3."""

import verifiers as vf


class Game(vf.MultiTurnEnv):
    pass
