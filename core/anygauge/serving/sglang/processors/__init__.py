"""Processors that a server loads beside SGLang's own, through ``SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE``."""
