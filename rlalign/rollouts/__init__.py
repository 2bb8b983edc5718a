"""From prompts to scored responses to minibatches."""
