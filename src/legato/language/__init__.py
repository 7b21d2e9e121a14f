"""Floor 4: text to tokens and tokens to text. Never imports torch, a model or HTTP."""
