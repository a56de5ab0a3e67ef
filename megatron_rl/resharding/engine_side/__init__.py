"""What runs inside an engine: one file, which an SGLang server imports by its own name and which needs torch alone."""
