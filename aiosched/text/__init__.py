"""Between text and tokens: tokenizer, incremental detokenizer, stop strings, chat templates."""
