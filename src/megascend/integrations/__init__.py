"""Integrations with other projects: one module or package for each, which alone imports that project."""
