"""The paper's equations as plain loops over numpy arrays, written from its text and the design's decisions alone.

Networks are given as `state`: a module's parameters and statistics by name, in float64."""

import math

import numpy as np

EPSILON = 1e-8


def unit(vector):
    return np.array([v / (math.sqrt(sum(w * w for w in vector)) + EPSILON) for v in vector])


def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def similarity(s_f, s_n):
    total = 0.0
    for a, b in zip(s_f, s_n, strict=True):
        total += sum((x - y) ** 2 for x, y in zip(unit(a), unit(b), strict=True))
    return total / s_f.size


def orthogonality(s_f, p_f, s_n, p_n):
    terms = [abs(dot(s_f[i], p_f[i])) + abs(dot(s_n[i], p_n[i])) for i in range(len(s_f))]
    return sum(terms) / len(terms)


def difference(p_f, p_n, margin=1.0):
    squares = [sum((x - y) ** 2 for x, y in zip(unit(a), unit(b), strict=True)) for a, b in zip(p_f, p_n, strict=True)]
    return max(0.0, margin - sum(squares) / len(squares))


def contrastive(h, label, site, temperature=0.07):
    z = [unit(v) for v in h]
    anchors = []
    for i in range(len(z)):
        positives = [j for j in range(len(z)) if j != i and label[j] == label[i] and site[j] != site[i]]
        if not positives:
            continue
        scores = {k: dot(z[i], z[k]) / temperature for k in range(len(z)) if k != i}
        largest = max(scores.values())
        denominator = largest + math.log(sum(math.exp(s - largest) for s in scores.values()))
        anchors.append(sum(scores[j] - denominator for j in positives) / len(positives))
    return -sum(anchors) / len(anchors) if anchors else 0.0


def cross_entropy(logits, label, weight, smoothing=0.1):
    """The target of a subject is 1 - smoothing at its label plus smoothing / classes everywhere; class c counts weight c."""
    total, norm = 0.0, 0.0
    for row, y in zip(logits, label, strict=True):
        log_sum = max(row) + math.log(sum(math.exp(v - max(row)) for v in row))
        for c, v in enumerate(row):
            aim = smoothing / len(row) + (1 - smoothing if c == y else 0.0)
            total += weight[c] * aim * (log_sum - v)
        norm += weight[y]
    return total / norm


def gradient(function, x, step=1e-6):
    """Central differences of a scalar function of a float64 array."""
    slope = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        slope[place] = (function(up) - function(down)) / (2 * step)
    return slope


def pearson(a, b):
    """Correlation of two ROIs; 0 where one of them is flat."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def group_correlation(series):
    """Mean over subjects of the correlations among the columns of (time, roi) series, the diagonal set to zero."""
    n = series[0].shape[1]
    mean = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            mean[i, j] = sum(pearson(one[:, i].astype(float), one[:, j].astype(float)) for one in series) / len(series)
            mean[j, i] = mean[i, j]
    return mean


def percentile(values, rank):
    values = sorted(values)
    place = (len(values) - 1) * rank / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def adjacency(mean, rank):
    n = len(mean)
    strengths = [abs(mean[i, j]) for i in range(n) for j in range(n) if i != j and mean[i, j] != 0]
    threshold = percentile(strengths, rank) if strengths else math.inf
    return np.array([[float(i == j or abs(mean[i, j]) >= threshold) for j in range(n)] for i in range(n)])


def softmax(row):
    powers = [math.exp(v - max(row)) for v in row]
    return np.array([p / sum(powers) for p in powers])


def operator(graph, embedding, beta=0.5):
    n = len(graph)
    learned = [softmax([dot(embedding[i], embedding[j]) for j in range(n)]) for i in range(n)]
    summed = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            summed[i, j] = beta * learned[i][j] + (1 - beta) * graph[i, j] + (i == j)
    degree = [sum(row) for row in summed]
    return np.array([[summed[i, j] / math.sqrt(degree[i] * degree[j]) for j in range(n)] for i in range(n)])


POLYNOMIALS = [{0: 1}, {1: 1}, {2: 2, 0: -1}, {3: 4, 1: -3}]  # power -> coefficient, written out rather than by recurrence


def chebyshev(matrix, features, weights, bias):
    """Features (roi, channel) of one timepoint."""
    out = np.tile(bias, (len(features), 1)).astype(float)
    for k in range(len(weights)):
        polynomial = sum(c * np.linalg.matrix_power(matrix, power) for power, c in POLYNOMIALS[k].items())
        out += polynomial @ features @ weights[k]
    return out


def under(state, prefix):
    return {name.removeprefix(prefix + "."): array for name, array in state.items() if name.startswith(prefix + ".")}


def gelu(x):
    return np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(np.asarray(x, float))


def linear(state, x):
    """Of a vector, or of each row of a matrix."""
    return np.array([linear(state, row) for row in x]) if x.ndim == 2 else state["weight"] @ x + state["bias"]


def mlp(state, x, places=(0, 3)):
    """Linear layers at some places of a sequence, a GELU between each two."""
    for place in places:
        x = linear(under(state, str(place)), x if place == places[0] else gelu(x))
    return x


def batch_norm(state, x):
    """Of (channel, ...) with the statistics gathered in training."""
    scale = state["weight"] / np.sqrt(state["running_var"] + 1e-5)
    return np.array([(x[c] - state["running_mean"][c]) * scale[c] + state["bias"][c] for c in range(len(x))])


def layer_norm(state, rows):
    rows = [(row - row.mean()) / math.sqrt(((row - row.mean()) ** 2).mean() + 1e-5) for row in rows]
    return np.array([row * state["weight"] + state["bias"] for row in rows])


def attention(state, queries, keys, heads):
    """Multi-head attention of (token, width) queries to the tokens that are both keys and values."""
    width = queries.shape[1]
    size = width // heads
    parts = []
    for part, tokens in enumerate((queries, keys, keys)):
        rows = slice(part * width, (part + 1) * width)
        parts.append(tokens @ state["in_proj_weight"][rows].T + state["in_proj_bias"][rows])
    q, k, v = parts
    mixed = np.zeros_like(q)
    for h in range(heads):
        own = slice(h * size, (h + 1) * size)
        for i in range(len(q)):
            share = softmax([dot(q[i, own], k[j, own]) / math.sqrt(size) for j in range(len(k))])
            mixed[i, own] = sum(share[j] * v[j, own] for j in range(len(k)))
    return linear(under(state, "out_proj"), mixed)


def convolution(weight, bias, x, stride=1):
    """(channel, time) with zeros half a kernel beyond both ends; every stride-th output is kept."""
    weight = weight.reshape(*weight.shape[:3])  # a kernel (time, 1) is one along time
    out, _, width = weight.shape
    half, time = width // 2, x.shape[1]
    y = np.zeros((out, -(-time // stride)))
    for o in range(out):
        for place in range(y.shape[1]):
            y[o, place] = bias[o]
            for tap in range(width):
                t = place * stride + tap - half
                if 0 <= t < time:
                    y[o, place] += dot(weight[o, :, tap], x[:, t])
    return y


def transformer_layer(state, tokens, heads):
    tokens = layer_norm(under(state, "norm1"), tokens + attention(under(state, "self_attn"), tokens, tokens, heads))
    wide = gelu(linear(under(state, "linear1"), tokens))
    return layer_norm(under(state, "norm2"), tokens + linear(under(state, "linear2"), wide))


def roi_tokens(state, series):
    """(roi, time) -> (roi, d): the shared convolutions along each ROI, flattened, projected, and who the ROI is."""
    tokens = []
    for n, one in enumerate(series):
        x = one[None, :]
        for place in (0, 5, 10):
            layer = under(state, f"convolutions.{place}")
            x = gelu(batch_norm(under(state, f"convolutions.{place + 1}"), convolution(layer["weight"], layer["bias"], x)))
            x = np.array([[max(row[2 * t], row[2 * t + 1]) for t in range(len(row) // 2)] for row in x])
        tokens.append(linear(under(state, "projection"), x.reshape(-1)) + state["identity"][n])
    return np.array(tokens)


def global_encoder(state, series, heads, layers):
    tokens = roi_tokens(state, series)
    for place in range(layers):
        tokens = transformer_layer(under(state, f"transformer.layers.{place}"), tokens, heads)
    return mlp(under(state, "output"), sum(tokens) / len(tokens))


def local_block(state, x, matrix, stride):
    """(channel, time, roi) -> (channel, time / stride, roi)."""
    time, rois = x.shape[1:]
    spatial = np.array([chebyshev(matrix, x[:, t].T, state["weights"], state["bias"]).T for t in range(time)])
    weight, bias = state["temporal.weight"][..., 0], state["temporal.bias"]
    y = np.stack([convolution(weight, bias, spatial[:, :, n].T, stride) for n in range(rois)], axis=-1)
    y = batch_norm(under(state, "norm"), y)
    rest = x
    if "residual.0.weight" in state:
        rest = np.einsum("oi,itn->otn", state["residual.0.weight"][..., 0, 0], x[:, ::stride])
        rest = batch_norm(under(state, "residual.1"), rest + state["residual.0.bias"][:, None, None])
    return np.maximum(y + rest, 0)


def local_encoder(state, series, strides, beta=0.5):
    matrix = operator(state["adjacency"], state["edges"], beta)
    x = series.T[None]
    for place, stride in enumerate(strides):
        x = local_block(under(state, f"blocks.{place}"), x, matrix, stride)
    return mlp(under(state, "output"), np.array([channel.mean() for channel in x]))


def phenotype_encoder(state, d):
    for place in (0, 4):
        d = gelu(batch_norm(under(state, str(place + 1)), linear(under(state, str(place)), d)))
    return linear(under(state, "8"), d)


def cross_attention(state, z_f, z_n, heads):
    """The scan's tokens ask first; the phenotypes' tokens then ask the scan's updated ones."""
    z_f = layer_norm(under(state, "norm_f"), z_f + attention(under(state, "attend_f"), z_f, z_n, heads))
    z_f = layer_norm(under(state, "norm_ff"), z_f + mlp(under(state, "feed_f"), z_f))
    z_n = layer_norm(under(state, "norm_n"), z_n + attention(under(state, "attend_n"), z_n, z_f, heads))
    z_n = layer_norm(under(state, "norm_nn"), z_n + mlp(under(state, "feed_n"), z_n))
    return z_f, z_n
