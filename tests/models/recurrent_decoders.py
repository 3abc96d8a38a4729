"""Reference implementations of recurrent decoders: the papers' equations, one text and one step at a time."""

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


def lstm_step(layers: nn.ModuleList, inputs: Tensor, states: list[State]) -> list[State]:
    """The (hidden, cell) states of unidirectional layers after one more input."""
    new_states = []
    for layer, (hidden, cell) in zip(layers, states, strict=True):
        if isinstance(layer, nn.LSTMCell):
            gates = layer.weight_ih @ inputs + layer.bias_ih + layer.weight_hh @ hidden + layer.bias_hh
        else:
            gates = layer.input_weight[0] @ inputs + layer.bias[0] + layer.state_weight[0] @ hidden
            gates = gates if layer.state_bias is None else gates + layer.state_bias[0]
        input_gate, forget_gate, candidate, output_gate = gates.chunk(4)
        cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
        inputs = output_gate.sigmoid() * cell.tanh()
        new_states.append((inputs, cell))
    return new_states


def gru_step(layer: nn.Module, direction: int, inputs: Tensor, state: Tensor) -> Tensor:
    input_terms = (layer.input_weight[direction] @ inputs + layer.bias[direction]).chunk(3)
    state_terms = (layer.state_weight[direction] @ state + layer.state_bias[direction]).chunk(3)
    reset, update = (input_terms[0] + state_terms[0]).sigmoid(), (input_terms[1] + state_terms[1]).sigmoid()
    return (1 - update) * (input_terms[2] + reset * state_terms[2]).tanh() + update * state


@torch.no_grad()
def cove(
    model: nn.Module, ids: Tensor, target: list[int], language: int = 0, attention: list[Tensor] | None = None
) -> Tensor:
    """(steps, vocabulary) log-probabilities of the word after each word of `target`; attention weights are appended to
    `attention`."""
    encoded, decoder = model.cove(input_ids=ids[None], output_final_states=True), model.decoder
    source = encoded.last_hidden_state[0, :, model.config.embedding_size :]  # H
    states = [*zip(encoded.final_hidden[0], encoded.final_cell[0], strict=True)]
    output, log_probs = torch.zeros(model.config.hidden_size), []
    for word in target:
        states = lstm_step(decoder.cells, torch.cat([decoder.embeddings.weight[word], output]), states)
        weights = torch.softmax(source @ decoder.query(states[-1][0]), 0)
        if attention is not None:
            attention.append(weights)
        output = decoder.combine(torch.cat([source.T @ weights, states[-1][0]])).tanh()
        log_probs.append(model.prediction(output).log_softmax(0))
    return torch.stack(log_probs)


@torch.no_grad()
def laser(model: nn.Module, ids: Tensor, target: list[int], language: int) -> Tensor:
    """As `cove`, for LASER."""
    sentence, decoder = model.laser(input_ids=ids[None]).pooler_output[0], model.decoder
    size = model.config.decoder_size
    states = [*zip(decoder.first_hidden(sentence).split(size), decoder.first_cell(sentence).split(size), strict=True)]
    log_probs = []
    for word in target:
        inputs = torch.cat([decoder.embeddings.weight[word], sentence, decoder.languages.weight[language]])
        states = lstm_step(decoder.layers, inputs, states)
        log_probs.append(model.prediction(states[-1][0]).log_softmax(0))
    return torch.stack(log_probs)


@torch.no_grad()
def gensen_embedding(model: nn.Module, ids: Tensor) -> Tensor:
    """(hidden,) embedding of one text: the final states of both directions."""
    inputs, length = model.embeddings.weight[ids], len(ids)
    for layer in model.layers:
        outputs = []
        for direction, positions in enumerate((range(length), range(length - 1, -1, -1))):
            states, state = {}, torch.zeros(layer.hidden_size)
            for position in positions:
                states[position] = state = gru_step(layer, direction, inputs[position], state)
            outputs.append(([states[position] for position in range(length)], state))
        inputs = torch.cat([torch.stack(states) for states, _ in outputs], -1)
    return torch.cat([state for _, state in outputs])


@torch.no_grad()
def gensen(model: nn.Module, ids: Tensor, target: list[int], language: int) -> Tensor:
    """As `cove`, for GenSen; `language` is the task."""
    decoder, log_probs = list(model.decoders.values())[language], []
    sentence = state = gensen_embedding(model.gensen, ids)
    for word in target:
        state = gru_step(decoder.layers[0], 0, torch.cat([decoder.embeddings.weight[word], sentence]), state)
        log_probs.append(decoder.prediction(state).log_softmax(0))
    return torch.stack(log_probs)


@torch.no_grad()
def lmseq2seq(model: nn.Module, ids: Tensor, target: list[int], language: int = 0) -> Tensor:
    """As `cove`, for the encoder-decoder from two language models."""
    config, lower_layer = model.config, model.config.pretrained_layers - 1
    states = [(torch.zeros(config.hidden_size), torch.zeros(config.hidden_size))] * config.num_hidden_layers
    outputs: list[list[Tensor]] = []
    for vector in model.encoder.word_embeddings.weight[ids]:
        states = lstm_step(model.encoder.layers, vector, states)
        outputs.append([hidden for hidden, _ in states])
    lower_source, top_source = (torch.stack([step[layer] for step in outputs]) for layer in (lower_layer, -1))
    log_probs = []
    for vector in model.decoder.word_embeddings.weight[target]:
        states = lstm_step(model.decoder.layers, vector, states)
        lower, top = states[lower_layer][0], states[-1][0]
        weights = torch.softmax(top_source @ model.query(top), 0)
        contexts = [lower_source.T @ weights] if config.multi_layer_attention else []
        output = model.combine(torch.cat([*contexts, top_source.T @ weights, top])).tanh()
        log_probs.append(model.prediction(output + lower if config.residual else output).log_softmax(0))
    return torch.stack(log_probs)


def cvt_states(model: nn.Module, ids: Tensor, target: list[int]) -> tuple[Tensor, list[Tensor]]:
    """CVT's encoder states (words, hidden) of a source, and the (hidden,) decoder states after each word."""
    source, decoder = model.cvt(input_ids=ids[None]).last_hidden_state[0], model.decoder  # H
    half = source.shape[1] // 2
    final = torch.cat([source[-1, :half], source[0, half:]])  # final states of both directions
    states, outputs = [(decoder.first_hidden(final), decoder.first_cell(final))], []
    for word in target:
        states = lstm_step(nn.ModuleList([decoder.layer]), decoder.embeddings.weight[word], states)
        outputs.append(states[0][0])
    return source, outputs


def cvt_attention_vector(context: nn.Module, source: Tensor, hidden: Tensor, *, use_attention: bool = True) -> Tensor:
    """(hidden,) tanh(W_a [c; h]) of an attention layer of CVT; without `use_attention` all weights are zero."""
    weights = torch.softmax(source @ context.query.weight @ hidden, 0) * use_attention
    return (context.combine.weight @ torch.cat([source.T @ weights, hidden])).tanh()


@torch.no_grad()
def cvt(model: nn.Module, ids: Tensor, target: list[int], language: int = 0) -> Tensor:
    """As `cove`, for the primary decoder of CVT."""
    source, states = cvt_states(model, ids, target)
    vectors = [cvt_attention_vector(model.context, source, hidden) for hidden in states]
    return torch.stack([model.prediction(vector).log_softmax(0) for vector in vectors])
