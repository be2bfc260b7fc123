"""Renderers: an ``Audit`` in, text out. Pure: no files of the user, no network, no printing."""
