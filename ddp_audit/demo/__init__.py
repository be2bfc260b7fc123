"""The jobs that ``ddp-audit demo`` runs. They need nothing but torch."""
