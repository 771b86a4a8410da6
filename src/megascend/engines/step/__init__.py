"""One step: plan, agree, build, run, collect."""
