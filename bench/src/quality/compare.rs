//! Distributions over the next token, one beside the other.

/// Logits of a run of tokens, row by row.
#[derive(Clone, Debug, Default)]
pub(super) struct Logits {
    rows: Vec<Vec<f32>>,
}

/// How a run of distributions stands to the right one.
#[derive(Clone, Debug)]
pub(super) struct Against {
    /// Whether all logits are the same to the bit.
    pub(super) equal_bits: bool,
    /// Kullback-Leibler divergence from the right distribution, nats: mean and 99th percentile.
    pub(super) kl_mean: f64,
    pub(super) kl_p99: f64,
    /// How often the likeliest token is the same.
    pub(super) same_top_percent: f64,
    /// By how much the perplexity of the text is above the right one.
    pub(super) perplexity_percent: f64,
}

impl Logits {
    pub(super) fn push(&mut self, row: &[f32]) {
        self.rows.push(row.to_vec());
    }

    /// exp of the mean surprise at the token that follows each row; further rows are not looked at.
    pub(super) fn perplexity(&self, following: &[u32]) -> f64 {
        let surprise = self.rows.iter().zip(following).map(|(row, token)| {
            let log = log_softmax(row);
            -log.get(*token as usize).copied().unwrap_or(f64::NEG_INFINITY)
        });
        (surprise.sum::<f64>() / following.len().max(1) as f64).exp()
    }
}

impl Against {
    /// What a reload without loss comes to.
    pub(super) fn equal() -> Against {
        Against {
            equal_bits: true,
            kl_mean: 0.0,
            kl_p99: 0.0,
            same_top_percent: 100.0,
            perplexity_percent: 0.0,
        }
    }

    /// Compares row by row.
    pub(super) fn of(right: &Logits, found: &Logits, following: &[u32]) -> Against {
        let pairs = || right.rows.iter().zip(&found.rows);
        let count = right.rows.len().min(found.rows.len()).max(1);
        let mut divergences: Vec<f64> = pairs().map(|(p, q)| divergence(p, q)).collect();
        divergences.sort_by(f64::total_cmp);
        let p99 = divergences.get((count - 1) * 99 / 100).copied().unwrap_or(0.0);
        let same = pairs().filter(|(p, q)| top(p) == top(q)).count();
        let bits = |row: &[f32]| row.iter().map(|each| each.to_bits()).collect::<Vec<_>>();
        let perplexity = found.perplexity(following) / right.perplexity(following);
        Against {
            equal_bits: right.rows.len() == found.rows.len()
                && pairs().all(|(p, q)| bits(p) == bits(q)),
            kl_mean: divergences.iter().sum::<f64>() / count as f64,
            kl_p99: p99,
            same_top_percent: 100.0 * same as f64 / count as f64,
            perplexity_percent: 100.0 * (perplexity - 1.0),
        }
    }
}

fn top(row: &[f32]) -> u32 {
    smallengine::best_token(row)
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let above = |value: &f32| f64::from(*value) - f64::from(most);
    let sum: f64 = row.iter().map(|value| above(value).exp()).sum();
    row.iter().map(|value| above(value) - sum.ln()).collect()
}

/// Of `q` from `p`: the mean over `p` of log p - log q.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p, q) = (log_softmax(p), log_softmax(q));
    let terms = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q));
    // Rounding can make a sum of almost nothing negative.
    terms.sum::<f64>().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(rows: &[[f32; 3]]) -> Logits {
        Logits { rows: rows.iter().map(|row| row.to_vec()).collect() }
    }

    #[test]
    fn known_distributions_have_the_known_divergence_and_perplexity() {
        // Shifted by a constant, logits mean the same.
        let even = logits(&[[7.0, 7.0, 7.0]]);
        assert!((even.perplexity(&[1]) - 3.0).abs() < 1e-9);
        let half = logits(&[[0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()]]);
        let against = Against::of(&half, &even, &[0]);
        // 0.5 log(0.5 x 3) + 2 x 0.25 log(0.25 x 3)
        let wanted = 0.5 * 1.5f64.ln() + 0.5 * 0.75f64.ln();
        assert!((against.kl_mean - wanted).abs() < 1e-6, "{against:?}");
        assert!((against.perplexity_percent - 50.0).abs() < 1e-4, "{against:?}");
        assert!(!against.equal_bits);
        let same = Against::of(&half, &half, &[0]);
        assert!(same.equal_bits && same.kl_mean == 0.0 && same.same_top_percent == 100.0);
    }

    #[test]
    fn the_likeliest_token_is_compared_row_by_row() {
        let right = logits(&[[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]);
        let found = logits(&[[2.0, 1.0, 0.0], [4.0, 0.0, 0.0]]);
        assert_eq!(Against::of(&right, &found, &[1]).same_top_percent, 50.0);
    }
}
