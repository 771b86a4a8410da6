"""What ends as time passes."""

from __future__ import annotations

from megascend.serve.scheduler.turns import spoil
from megascend.serve.service import Service
from megascend.serve.tenancy import Model

SWEEP_S = 600.0
"""How often checkpoints whose time is over are looked for."""


def sweep(service: Service) -> None:
    """End what is over: silent sessions, waits for requests that never came, answers nobody fetched."""
    if service.durability.stalled:  # nobody is answered: that is nobody's silence
        service.tenancy.heard_of_all()
        service.futures.keep_longer()
        return
    for session in service.tenancy.silent(service.settings.session_timeout_s):
        service.end_session(session)
    for model in list(service.tenancy.models.values()):
        if model.gap_since is not None and service.clock() - model.gap_since > service.settings.gap_timeout_s:
            _skip_missing(service, model)
    service.futures.forget()
    service.sequences.expire()
    if service.clock() - service.swept > SWEEP_S:
        service.swept = service.clock()
        service.checkpoints.remove_expired()


def _skip_missing(service: Service, model: Model) -> None:
    """Let those run that wait for requests which have not come; the step that these belonged to fails."""
    for number in model.order.missing():
        problem = f"request {number} of this model did not come within {service.settings.gap_timeout_s} s"
        spoil(service, model, number, problem)
    model.gap_since = service.clock() if model.order.early else None
