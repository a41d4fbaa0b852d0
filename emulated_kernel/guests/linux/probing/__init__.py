"""The probe engine and tracing over a distribution's kernel."""
