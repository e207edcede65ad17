"""The studies, in small."""
