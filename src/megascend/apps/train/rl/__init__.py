"""The application behind ``megascend rl``: rollouts, steps on them, weights to the engines, evaluation."""
