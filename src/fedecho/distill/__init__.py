"""Uncertainty-aware distillation: the loss, the banks of latest logits, the student and the distiller."""

from fedecho.distill.bank import Bank
from fedecho.distill.distiller import Distiller
from fedecho.distill.loss import distillation_loss, normalized_entropy, soft_weight
from fedecho.distill.student import Student

__all__ = ["Bank", "Distiller", "Student", "distillation_loss", "normalized_entropy", "soft_weight"]
