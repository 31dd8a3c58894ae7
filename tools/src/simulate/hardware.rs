//! GPUs by name, from their makers' data sheets, and the part of those figures that a server reaches. Has no knowledge
//! of models.

use coordinator::{Link, Links, Speed};

/// Figures as advertised: dense, per GPU, links in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuSpec {
    pub name: &'static str,
    pub memory_bytes: u64,
    pub bytes_per_s: f64,
    pub bf16_flops: f64,
    /// None where tensor cores lack the format: one-byte weights are widened before the product.
    pub fp8_flops: Option<f64>,
    /// Bandwidth to the other GPUs of its node, and the time of the smallest sum over all of them.
    pub link_bytes_per_s: f64,
    pub sum_micros: f64,
    /// Bandwidth of the network to other nodes, per GPU.
    pub net_bytes_per_s: f64,
    pub dollars_per_hour: f64,
}

const GB: u64 = 1_000_000_000;
const GIB: u64 = 1 << 30;
const TERA: f64 = 1e12;
/// Time of a small sum through an NVSwitch, as serving frameworks measure it, and through PCIe and the host.
const NVLINK_SUM_MICROS: f64 = 8.0;
const PCIE_SUM_MICROS: f64 = 25.0;
/// Bandwidth of PCIe 4.0 x16.
const PCIE4: f64 = 32e9;

/// Memory, bandwidth and FLOP/s: NVIDIA's data sheets (A10, A100 80GB, L4, L40S, H100 SXM, H200 SXM, H20) and, of B200,
/// a DGX B200's divided by eight; figures "with sparsity" are halved. Network: the bandwidth per GPU of a DGX of that
/// kind, and 100 Gbit/s where there is no DGX. Prices: an estimate of on-demand prices per GPU at specialised clouds in
/// 2025, rounded; the large clouds cost two to three times as much. `--price-per-gpu-hour` replaces it.
pub const GPUS: [GpuSpec; 9] = [
    GpuSpec {
        name: "l4",
        memory_bytes: 24 * GB,
        bytes_per_s: 0.3 * TERA,
        bf16_flops: 121.0 * TERA,
        fp8_flops: Some(242.0 * TERA),
        link_bytes_per_s: PCIE4,
        sum_micros: PCIE_SUM_MICROS,
        net_bytes_per_s: 12.5e9,
        dollars_per_hour: 0.6,
    },
    GpuSpec {
        name: "a10",
        memory_bytes: 24 * GB,
        bytes_per_s: 0.6 * TERA,
        bf16_flops: 125.0 * TERA,
        fp8_flops: None,
        link_bytes_per_s: PCIE4,
        sum_micros: PCIE_SUM_MICROS,
        net_bytes_per_s: 12.5e9,
        dollars_per_hour: 0.75,
    },
    GpuSpec {
        name: "l40s",
        memory_bytes: 48 * GB,
        bytes_per_s: 0.864 * TERA,
        bf16_flops: 362.0 * TERA,
        fp8_flops: Some(733.0 * TERA),
        link_bytes_per_s: PCIE4,
        sum_micros: PCIE_SUM_MICROS,
        net_bytes_per_s: 12.5e9,
        dollars_per_hour: 1.0,
    },
    GpuSpec { name: "a100-40gb", memory_bytes: 40 * GIB, bytes_per_s: 1.555 * TERA, dollars_per_hour: 1.3, ..A100 },
    A100,
    H100,
    GpuSpec { name: "h200", memory_bytes: 141 * GB, bytes_per_s: 4.8 * TERA, dollars_per_hour: 3.5, ..H100 },
    GpuSpec {
        name: "h20",
        memory_bytes: 96 * GB,
        bytes_per_s: 4.0 * TERA,
        bf16_flops: 148.0 * TERA,
        fp8_flops: Some(296.0 * TERA),
        dollars_per_hour: 1.5,
        ..H100
    },
    GpuSpec {
        name: "b200",
        memory_bytes: 180 * GB,
        bytes_per_s: 8.0 * TERA,
        bf16_flops: 2250.0 * TERA,
        fp8_flops: Some(4500.0 * TERA),
        link_bytes_per_s: 900e9,
        dollars_per_hour: 5.0,
        ..H100
    },
];

const A100: GpuSpec = GpuSpec {
    name: "a100",
    memory_bytes: 80 * GIB,
    bytes_per_s: 2.039 * TERA,
    bf16_flops: 312.0 * TERA,
    fp8_flops: None,
    link_bytes_per_s: 300e9,
    sum_micros: NVLINK_SUM_MICROS,
    net_bytes_per_s: 25e9,
    dollars_per_hour: 1.75,
};

const H100: GpuSpec = GpuSpec {
    name: "h100",
    memory_bytes: 80 * GIB,
    bytes_per_s: 3.35 * TERA,
    bf16_flops: 989.0 * TERA,
    fp8_flops: Some(1979.0 * TERA),
    link_bytes_per_s: 450e9,
    sum_micros: NVLINK_SUM_MICROS,
    net_bytes_per_s: 50e9,
    dollars_per_hour: 2.5,
};

/// GPUs in one machine.
pub const GPUS_PER_NODE: u16 = 8;
/// Time of a small sum over the network.
const NET_SUM_MICROS: f64 = 40.0;
/// Time for rows to go from one stage to the next.
const LINK_HOP_MICROS: f64 = 5.0;
const NET_HOP_MICROS: f64 = 15.0;
/// The part of a link's bandwidth that is reached.
const LINK_EFFICIENCY: f64 = 0.75;

pub fn find(name: &str) -> Result<GpuSpec, String> {
    let known = || GPUS.iter().map(|gpu| gpu.name).collect::<Vec<_>>().join(", ");
    let found = GPUS.iter().find(|gpu| gpu.name.eq_ignore_ascii_case(name));
    found.copied().ok_or_else(|| format!("{name:?} is not a known GPU: {}", known()))
}

/// The part of a GPU's figures that is reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Efficiency {
    pub bandwidth: f64,
    pub compute: f64,
}

impl GpuSpec {
    /// Returns the speed. `is_fp8` means that both operands of products with weights are fp8.
    pub fn speed(&self, efficiency: Efficiency, is_fp8: bool) -> Speed {
        let flops = self.fp8_flops.filter(|_| is_fp8).unwrap_or(self.bf16_flops);
        Speed {
            bytes_per_s: self.bytes_per_s * efficiency.bandwidth,
            flops: flops * efficiency.compute,
            attention_flops: self.bf16_flops * efficiency.compute,
        }
    }

    /// Returns the links of each of `n_stages` stages of `tp` ranks, which fill one node after another.
    pub fn links(&self, tp: u16, n_stages: u16) -> Vec<Links> {
        let node = |rank: u16| rank / GPUS_PER_NODE;
        let link = |is_near: bool, near: f64, far: f64| Link {
            latency_micros: if is_near { near } else { far },
            bytes_per_s: LINK_EFFICIENCY * if is_near { self.link_bytes_per_s } else { self.net_bytes_per_s },
        };
        let of = |stage: u16| {
            let (first, last) = (stage * tp, (stage + 1) * tp - 1);
            let next = (stage + 1) % n_stages * tp;
            Links {
                within: link(node(first) == node(last), self.sum_micros, NET_SUM_MICROS),
                onward: link(node(first) == node(next + tp - 1), LINK_HOP_MICROS, NET_HOP_MICROS),
            }
        };
        (0..n_stages).map(of).collect()
    }
}
