"""The probe engine and the tracing of a running distribution's kernel."""
